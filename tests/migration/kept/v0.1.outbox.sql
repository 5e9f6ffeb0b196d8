BEGIN TRANSACTION;
CREATE TABLE millstream_inbox (
	id VARCHAR(130) NOT NULL, 
	accepted_us BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "millstream_inbox" VALUES('subscription-5241783c1f8d568a7ad6/task-08ba964e020034154dce',1796051313666234);
CREATE TABLE millstream_outbox (
	id VARCHAR(64) NOT NULL, 
	target VARCHAR(64) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	handler VARCHAR(200) NOT NULL, 
	"key" VARCHAR(200) NOT NULL, 
	digest VARCHAR(80) NOT NULL, 
	request TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	cause VARCHAR(16) NOT NULL, 
	reason TEXT NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	sends INTEGER NOT NULL, 
	tries INTEGER NOT NULL, 
	failures INTEGER NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	claim VARCHAR(64) NOT NULL, 
	generation BIGINT NOT NULL, 
	lease_us BIGINT NOT NULL, 
	due_us BIGINT NOT NULL, 
	since_us BIGINT NOT NULL, 
	created_us BIGINT NOT NULL, 
	sent_us BIGINT NOT NULL, 
	changed_us BIGINT NOT NULL, 
	actor VARCHAR(128) NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT millstream_outbox_identity UNIQUE (target, namespace, handler, "key"), 
	CONSTRAINT millstream_outbox_state CHECK (state IN ('WAITING', 'SENDING', 'SENT', 'PARKED')), 
	CONSTRAINT millstream_outbox_held CHECK ((state = 'SENDING') = (owner <> '')), 
	CONSTRAINT millstream_outbox_sent CHECK ((state = 'SENT') = (task <> ''))
);
INSERT INTO "millstream_outbox" VALUES('task-c0057ebf2e587296900c','installation-35a0cad3f94d3b11920e880b0bf9e738a286671e','default','echo','outbox','1:028889502ef43aef1996793a2ca38c93','{"id":"task-c0057ebf2e587296900c","namespace":"default","handler":"echo","key":"outbox","digest":"1:028889502ef43aef1996793a2ca38c93","queue":"default","args":"[[],[[\"l\",\"from the outbox\"],[\"k\"]]]","effects":"idempotent","policy":{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false},"priority":0,"delay_us":0,"due_us":0,"expires_us":0,"start_by_us":0,"deadline_us":0,"permit":"","ordered":false,"business_key":"","origin":"outbox","root":"","retry_of":"","actor":""}','WAITING','','','',0,0,0,'','',0,0,1796051313395024,1796051313395024,1796051313395024,0,1796051313395024,'',0);
CREATE INDEX millstream_outbox_due_i ON millstream_outbox (target, state, due_us);
COMMIT;
