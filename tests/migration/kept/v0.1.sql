BEGIN TRANSACTION;
CREATE TABLE millstream_acceptance (
	quota VARCHAR(160) NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	at_us BIGINT NOT NULL, 
	number INTEGER NOT NULL, 
	PRIMARY KEY (quota, task)
);
CREATE TABLE millstream_ack (
	job VARCHAR(64) NOT NULL, 
	epoch BIGINT NOT NULL, 
	subtask VARCHAR(80) NOT NULL, 
	generation BIGINT NOT NULL, 
	attempt VARCHAR(64) NOT NULL, 
	snapshot TEXT NOT NULL, 
	declined TEXT NOT NULL, 
	acked_us BIGINT NOT NULL, 
	PRIMARY KEY (job, epoch, subtask)
);
CREATE TABLE millstream_alembic (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT millstream_alembic_pkc PRIMARY KEY (version_num)
);
INSERT INTO "millstream_alembic" VALUES('0003');
CREATE TABLE millstream_assignment (
	job VARCHAR(64) NOT NULL, 
	generation BIGINT NOT NULL, 
	subtask VARCHAR(80) NOT NULL, 
	node VARCHAR(64) NOT NULL, 
	attempt VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	cause VARCHAR(32) NOT NULL, 
	detail TEXT NOT NULL, 
	committed BIGINT NOT NULL, 
	commit_detail TEXT NOT NULL, 
	exhausted INTEGER NOT NULL, 
	progress BIGINT NOT NULL, 
	progressed_us BIGINT NOT NULL, 
	stats TEXT NOT NULL, 
	changed_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (job, generation, subtask), 
	CONSTRAINT millstream_assignment_state CHECK (state IN ('ASSIGNED', 'STARTED', 'READY', 'FINISHED', 'FAILED'))
);
CREATE TABLE millstream_attempt (
	task VARCHAR(64) NOT NULL, 
	fence BIGINT NOT NULL, 
	number INTEGER NOT NULL, 
	session VARCHAR(64) NOT NULL, 
	outcome VARCHAR(32) NOT NULL, 
	cause VARCHAR(16) NOT NULL, 
	detail TEXT NOT NULL, 
	late INTEGER NOT NULL, 
	started_us BIGINT NOT NULL, 
	ended_us BIGINT NOT NULL, 
	PRIMARY KEY (task, fence, number)
);
INSERT INTO "millstream_attempt" VALUES('task-9907c14537b15fbf204e',1,0,'session-19c11b6c73806a2e192e','Raised','attempts','ValueError: kept for later versions (at fail, line 53)',0,1796051311805181,1796051311818088);
INSERT INTO "millstream_attempt" VALUES('task-c087580d983d7ebcf61e',1,0,'session-19c11b6c73806a2e192e','AskedForReview','handler','asked for 1',0,1796051311965014,1796051312141543);
INSERT INTO "millstream_attempt" VALUES('task-383fefb14f34a546379d',1,0,'session-19c11b6c73806a2e192e','InDoubt','intent','nobody knows whether ''doubted'' was called: ZeroDivisionError: division by zero; its handler has no reconcile hook',0,1796051312056710,1796051312166489);
INSERT INTO "millstream_attempt" VALUES('task-5b46913f298eb44318c2',1,0,'session-19c11b6c73806a2e192e','RetryAsked','handler','not this year',0,1796051312527873,1796051312563916);
INSERT INTO "millstream_attempt" VALUES('task-d5c1e6ce925376e405e6',1,0,'session-19c11b6c73806a2e192e','Raised','attempts','ValueError: kept for later versions (at fail, line 53)',0,1796051313174297,1796051313211968);
CREATE TABLE millstream_channel (
	job VARCHAR(64) NOT NULL, 
	generation BIGINT NOT NULL, 
	edge VARCHAR(16) NOT NULL, 
	source INTEGER NOT NULL, 
	target INTEGER NOT NULL, 
	PRIMARY KEY (job, generation, edge, source, target)
);
CREATE TABLE millstream_coordinator (
	id VARCHAR(32) NOT NULL, 
	holder VARCHAR(64) NOT NULL, 
	term BIGINT NOT NULL, 
	expires_us BIGINT NOT NULL, 
	ticked_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "millstream_coordinator" VALUES('coordinator','',1,0,0,2);
INSERT INTO "millstream_coordinator" VALUES('subscriptions','',1,0,0,1);
INSERT INTO "millstream_coordinator" VALUES('task-sweep','',0,1796051321267974,1796051313682520,13);
CREATE TABLE millstream_delivery (
	subscription VARCHAR(64) NOT NULL, 
	event VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	attempts INTEGER NOT NULL, 
	due_us BIGINT, 
	lease VARCHAR(64) NOT NULL, 
	reason TEXT NOT NULL, 
	actor VARCHAR(128) NOT NULL, 
	created_us BIGINT NOT NULL, 
	changed_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (subscription, event), 
	CONSTRAINT millstream_delivery_state CHECK (state IN ('PENDING', 'LEASED', 'ACKNOWLEDGED', 'PARKED', 'PASSED')), 
	CONSTRAINT millstream_delivery_due CHECK ((due_us IS NOT NULL) = (state IN ('PENDING', 'LEASED'))), 
	CONSTRAINT millstream_delivery_lease CHECK ((lease <> '') = (state = 'LEASED'))
);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-08ba964e020034154dce','LEASED',1,1796051373252802,'lease-abe03a696cd94252cd85','','',1796051311923602,1796051313252802,1);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-216455606f77ae8c5745','LEASED',1,1796051373252802,'lease-abe03a696cd94252cd85','','',1796051311923602,1796051313252802,1);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-30bef8e1121e88a7c6ba','LEASED',1,1796051373252802,'lease-abe03a696cd94252cd85','','',1796051311923602,1796051313252802,1);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-544a9ebe1bb9c7bae735','LEASED',1,1796051373252802,'lease-abe03a696cd94252cd85','','',1796051311923602,1796051313252802,1);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-83457bc935cff059e8d3','LEASED',1,1796051373252802,'lease-abe03a696cd94252cd85','','',1796051311923602,1796051313252802,1);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-cf05ab659cc895501758','PENDING',0,1796051311923602,'','','',1796051311923602,1796051311923602,0);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-da3e1314fba4a69d23f7','PENDING',0,1796051311923602,'','','',1796051311923602,1796051311923602,0);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-a4d5ed602466ec758008','PENDING',0,1796051311923602,'','','',1796051311923602,1796051311923602,0);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-1ce9f424efd51e0702f6','LEASED',1,1796051373252802,'lease-abe03a696cd94252cd85','','',1796051311923602,1796051313252802,1);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-4f089e55e062f2fe6a79','LEASED',1,1796051373252802,'lease-abe03a696cd94252cd85','','',1796051311923602,1796051313252802,1);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-720d0aa50460287ea437','LEASED',1,1796051373252802,'lease-abe03a696cd94252cd85','','',1796051311923602,1796051313252802,1);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-76f102b2eacf8341929d','LEASED',1,1796051373252802,'lease-abe03a696cd94252cd85','','',1796051311923602,1796051313252802,1);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-893f210168c8fe7ed930','LEASED',1,1796051373252802,'lease-abe03a696cd94252cd85','','',1796051311923602,1796051313252802,1);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-a98f076a8c17099d0a72','PENDING',0,1796051311923602,'','','',1796051311923602,1796051311923602,0);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-eff85893fec63692e55e','PENDING',0,1796051312729962,'','','',1796051312729962,1796051312729962,0);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-3734c734ca28f641054a','PENDING',0,1796051313001142,'','','',1796051313001142,1796051313001142,0);
INSERT INTO "millstream_delivery" VALUES('subscription-5241783c1f8d568a7ad6','task-16f5bbd3d3440884e0f2','PENDING',0,1796051313240176,'','','',1796051313240176,1796051313240176,0);
CREATE TABLE millstream_epoch (
	job VARCHAR(64) NOT NULL, 
	epoch BIGINT NOT NULL, 
	generation BIGINT NOT NULL, 
	term BIGINT NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason TEXT NOT NULL, 
	savepoint VARCHAR(128) NOT NULL, 
	splits TEXT NOT NULL, 
	size BIGINT NOT NULL, 
	triggered_us BIGINT NOT NULL, 
	durable_us BIGINT NOT NULL, 
	committed_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (job, epoch), 
	CONSTRAINT millstream_epoch_state CHECK (state IN ('TRIGGERED', 'PRECOMMITTED', 'DURABLE', 'COMMITTED', 'ABORTED'))
);
CREATE TABLE millstream_event (
	id VARCHAR(64) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	handler VARCHAR(200) NOT NULL, 
	"key" VARCHAR(200) NOT NULL, 
	queue VARCHAR(64) NOT NULL, 
	business_key VARCHAR(200) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	cause VARCHAR(16) NOT NULL, 
	reason TEXT NOT NULL, 
	result TEXT NOT NULL, 
	error TEXT NOT NULL, 
	origin VARCHAR(200) NOT NULL, 
	root VARCHAR(64) NOT NULL, 
	retry_of VARCHAR(64) NOT NULL, 
	superseded_by VARCHAR(64) NOT NULL, 
	created_us BIGINT NOT NULL, 
	settled_us BIGINT NOT NULL, 
	seen BIGINT NOT NULL, 
	pending INTEGER, 
	PRIMARY KEY (id)
);
INSERT INTO "millstream_event" VALUES('task-08ba964e020034154dce','default','echo','value-6','default','values','SUCCEEDED','','','[[],[["D","1.10"]]]','','direct','task-08ba964e020034154dce','','',1796051311446383,1796051311661219,1,NULL);
INSERT INTO "millstream_event" VALUES('task-216455606f77ae8c5745','default','echo','value-0','default','values','SUCCEEDED','','','[[],[null]]','','direct','task-216455606f77ae8c5745','','',1796051311396598,1796051311661219,1,NULL);
INSERT INTO "millstream_event" VALUES('task-30bef8e1121e88a7c6ba','default','echo','value-5','default','values','SUCCEEDED','','','[[],[["f","inf"]]]','','direct','task-30bef8e1121e88a7c6ba','','',1796051311438483,1796051311661219,1,NULL);
INSERT INTO "millstream_event" VALUES('task-544a9ebe1bb9c7bae735','default','echo','value-4','default','values','SUCCEEDED','','','[[],[0.1]]','','direct','task-544a9ebe1bb9c7bae735','','',1796051311428130,1796051311661219,1,NULL);
INSERT INTO "millstream_event" VALUES('task-83457bc935cff059e8d3','default','echo','value-2','default','values','SUCCEEDED','','','[[],[["i","0x1d6329f1c35ca4bfabb9f5610000000000"]]]','','direct','task-83457bc935cff059e8d3','','',1796051311417533,1796051311661219,1,NULL);
INSERT INTO "millstream_event" VALUES('task-cf05ab659cc895501758','default','echo','value-1','default','values','SUCCEEDED','','','[[],[true]]','','direct','task-cf05ab659cc895501758','','',1796051311407515,1796051311661219,1,NULL);
INSERT INTO "millstream_event" VALUES('task-da3e1314fba4a69d23f7','default','echo','value-3','default','values','SUCCEEDED','','','[[],[-1]]','','direct','task-da3e1314fba4a69d23f7','','',1796051311421859,1796051311661219,1,NULL);
INSERT INTO "millstream_event" VALUES('task-a4d5ed602466ec758008','default','echo','value-7','default','values','SUCCEEDED','','','[[],["é\u0000\n"]]','','direct','task-a4d5ed602466ec758008','','',1796051311453015,1796051311725297,1,NULL);
INSERT INTO "millstream_event" VALUES('task-1ce9f424efd51e0702f6','default','echo','value-8','default','values','SUCCEEDED','','','[[],[["y","AP8="]]]','','direct','task-1ce9f424efd51e0702f6','','',1796051311462015,1796051311739744,1,NULL);
INSERT INTO "millstream_event" VALUES('task-4f089e55e062f2fe6a79','default','echo','value-12','default','values','SUCCEEDED','','','[[],[["t",1,"a"]]]','','direct','task-4f089e55e062f2fe6a79','','',1796051311490568,1796051311739744,1,NULL);
INSERT INTO "millstream_event" VALUES('task-720d0aa50460287ea437','default','echo','value-10','default','values','SUCCEEDED','','','[[],[["d",739617]]]','','direct','task-720d0aa50460287ea437','','',1796051311472860,1796051311739744,1,NULL);
INSERT INTO "millstream_event" VALUES('task-76f102b2eacf8341929d','default','echo','value-9','default','values','SUCCEEDED','','','[[],[["m",["t",63902822400000000,0,0]]]]','','direct','task-76f102b2eacf8341929d','','',1796051311468724,1796051311739744,1,NULL);
INSERT INTO "millstream_event" VALUES('task-893f210168c8fe7ed930','default','echo','value-13','default','values','SUCCEEDED','','','[[],[["k","a",["l",1,["k","b",null]],"c",["s",1,2]]]]','','direct','task-893f210168c8fe7ed930','','',1796051311498304,1796051311739744,1,NULL);
INSERT INTO "millstream_event" VALUES('task-a98f076a8c17099d0a72','default','echo','value-11','default','values','SUCCEEDED','','','[[],[["e",1]]]','','direct','task-a98f076a8c17099d0a72','','',1796051311482037,1796051311739744,1,NULL);
INSERT INTO "millstream_event" VALUES('task-eff85893fec63692e55e','default','echo','cancelled','default','','CANCELLED','cancelled','','','','direct','task-eff85893fec63692e55e','','',1796051312549714,1796051312585941,1,NULL);
INSERT INTO "millstream_event" VALUES('task-3734c734ca28f641054a','default','echo','expired','default','','EXPIRED','start_by','','','','direct','task-3734c734ca28f641054a','','',1796051312634563,1796051312938982,1,NULL);
INSERT INTO "millstream_event" VALUES('task-16f5bbd3d3440884e0f2','default','echo','schedule/yearly/manual/by-hand/0','default','','SUCCEEDED','','','[[],[1]]','','schedule:yearly:1:1796051312666087','task-16f5bbd3d3440884e0f2','','',1796051312677827,1796051313211968,1,NULL);
CREATE TABLE millstream_fire (
	namespace VARCHAR(64) NOT NULL, 
	schedule VARCHAR(64) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	request VARCHAR(64) NOT NULL, 
	slot BIGINT NOT NULL, 
	instant_us BIGINT NOT NULL, 
	until_us BIGINT NOT NULL, 
	times BIGINT NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason TEXT NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	unsettled INTEGER NOT NULL, 
	late INTEGER NOT NULL, 
	actor VARCHAR(128) NOT NULL, 
	recorded_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (namespace, schedule, kind, request, slot), 
	CONSTRAINT millstream_fire_kind CHECK (kind IN ('auto', 'manual', 'backfill')), 
	CONSTRAINT millstream_fire_state CHECK (state IN ('QUEUED', 'FIRED', 'SKIPPED', 'MISSED')), 
	CONSTRAINT millstream_fire_task CHECK ((state = 'FIRED') = (task <> '')), 
	CONSTRAINT millstream_fire_range CHECK (times >= 1 AND until_us >= instant_us)
);
INSERT INTO "millstream_fire" VALUES('default','yearly','manual','by-hand',0,1796051312666087,1796051312666087,1,1,'FIRED','','task-16f5bbd3d3440884e0f2',1,0,'',1796051312666087,0);
CREATE TABLE millstream_gate (
	id VARCHAR(300) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	paused INTEGER NOT NULL, 
	paused_by VARCHAR(128) NOT NULL, 
	paused_why TEXT NOT NULL, 
	paused_us BIGINT NOT NULL, 
	rate INTEGER NOT NULL, 
	per_us BIGINT NOT NULL, 
	burst INTEGER NOT NULL, 
	level BIGINT NOT NULL, 
	level_us BIGINT NOT NULL, 
	wake_us BIGINT, 
	changed_by VARCHAR(128) NOT NULL, 
	changed_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT millstream_gate_kind CHECK (kind IN ('queue', 'handler', 'permit')), 
	CONSTRAINT millstream_gate_rate CHECK (rate = 0 OR (burst >= 1 AND per_us >= 1)), 
	CONSTRAINT millstream_gate_level CHECK (level >= 0)
);
INSERT INTO "millstream_gate" VALUES('queue:default/idle','default','queue','idle',1,'unnamed','kept',1796051312773528,0,0,0,0,0,NULL,'unnamed',1796051312773528,1);
INSERT INTO "millstream_gate" VALUES('queue:default/slow','default','queue','slow',0,'','',0,10,1000000,10,10000000,1796051313174297,NULL,'unnamed',1796051312795299,2);
INSERT INTO "millstream_gate" VALUES('queue:default/later','default','queue','later',1,'unnamed','kept',1796051313108027,0,0,0,0,0,NULL,'unnamed',1796051313108027,1);
CREATE TABLE millstream_handler (
	name VARCHAR(200) NOT NULL, 
	version VARCHAR(80) NOT NULL, 
	queue VARCHAR(64) NOT NULL, 
	effects VARCHAR(16) NOT NULL, 
	policy TEXT NOT NULL, 
	permit TEXT NOT NULL, 
	ordered INTEGER NOT NULL, 
	parameters TEXT NOT NULL, 
	since_us BIGINT NOT NULL, 
	seen_us BIGINT NOT NULL, 
	PRIMARY KEY (name, version), 
	CONSTRAINT millstream_handler_effects CHECK (effects IN ('idempotent', 'transactional', 'external'))
);
INSERT INTO "millstream_handler" VALUES('again','117aae85575ec8dac849d241f5544900','default','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','',0,'[]',1796051311121485,1796051311121485);
INSERT INTO "millstream_handler" VALUES('book','de8bb2c2eaa2d7f06fe3621c09a5af49','default','transactional','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','account:{number}',0,'[{"name":"number","kind":"POSITIONAL_OR_KEYWORD","required":true,"schema":{"type":"integer","x-python":"int"}}]',1796051311121485,1796051311121485);
INSERT INTO "millstream_handler" VALUES('call','94e385a4b6bf794bf3bfe047975330ce','calls','external','{"attempts":1,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','',0,'[{"name":"number","kind":"POSITIONAL_OR_KEYWORD","required":true,"schema":{"type":"integer","x-python":"int"}}]',1796051311121485,1796051311121485);
INSERT INTO "millstream_handler" VALUES('echo','83826f80cb665844169e761c1c242e89','default','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','',0,'[{"name":"value","kind":"POSITIONAL_OR_KEYWORD","required":true,"schema":{"x-python":"any"}}]',1796051311121485,1796051311121485);
INSERT INTO "millstream_handler" VALUES('fail','27c741ce1db5441822ba44dfc820a3db','default','idempotent','{"attempts":1,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','',0,'[]',1796051311121485,1796051311121485);
INSERT INTO "millstream_handler" VALUES('hold','eb62dc890806092e35b680121f49e313','slow','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','',0,'[]',1796051311121485,1796051311121485);
CREATE TABLE millstream_history (
	job VARCHAR(64) NOT NULL, 
	seq BIGINT NOT NULL, 
	event VARCHAR(32) NOT NULL, 
	detail TEXT NOT NULL, 
	at_us BIGINT NOT NULL, 
	PRIMARY KEY (job, seq)
);
CREATE TABLE millstream_installation (
	id INTEGER NOT NULL, 
	uid VARCHAR(64) NOT NULL, 
	secret VARCHAR(128) NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "millstream_installation" VALUES(1,'installation-35a0cad3f94d3b11920e880b0bf9e738a286671e','secret-b3d6262231c859d2c774631b3609f4929f7a7d8c73f305276d7733245398a3a8');
CREATE TABLE millstream_intent (
	root VARCHAR(64) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	"key" VARCHAR(200) NOT NULL, 
	idempotency_key VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	fence BIGINT NOT NULL, 
	opening VARCHAR(64) NOT NULL, 
	calls INTEGER NOT NULL, 
	result TEXT, 
	detail TEXT NOT NULL, 
	closed_by VARCHAR(200) NOT NULL, 
	opened_us BIGINT NOT NULL, 
	closed_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (root, name, "key"), 
	CONSTRAINT millstream_intent_state CHECK (state IN ('OPEN', 'DONE', 'NOT_DONE')), 
	CONSTRAINT millstream_intent_closed CHECK ((state = 'OPEN') = (closed_us = 0)), 
	CONSTRAINT millstream_intent_result CHECK (result IS NULL OR state = 'DONE')
);
INSERT INTO "millstream_intent" VALUES('task-c087580d983d7ebcf61e','known','','millstream-1-837c4e466f98e3ae60853af3701a7932','DONE','task-c087580d983d7ebcf61e',1,'intent-72d44b930461f05e3f09',1,'[[],[1]]','','attempt 1 of task-c087580d983d7ebcf61e',1796051312002222,1796051312039226,1);
INSERT INTO "millstream_intent" VALUES('task-383fefb14f34a546379d','known','','millstream-1-cf99099eac7f2a9cf2f03d0e98530dc5','DONE','task-383fefb14f34a546379d',1,'intent-062e55c29fe518791b60',1,'[[],[2]]','','attempt 1 of task-383fefb14f34a546379d',1796051312066509,1796051312094255,1);
INSERT INTO "millstream_intent" VALUES('task-383fefb14f34a546379d','doubted','','millstream-1-72521741269d65e711c2f03107045ade','OPEN','task-383fefb14f34a546379d',1,'intent-d288b48d8a56cd839698',1,NULL,'ZeroDivisionError: division by zero','',1796051312113298,0,1);
CREATE TABLE millstream_job (
	id VARCHAR(64) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	factory VARCHAR(128) NOT NULL, 
	config TEXT NOT NULL, 
	parallelism INTEGER, 
	overrides TEXT NOT NULL, 
	settings TEXT NOT NULL, 
	"plan" TEXT NOT NULL, 
	model TEXT NOT NULL, 
	plan_fingerprint VARCHAR(64) NOT NULL, 
	state VARCHAR(32) NOT NULL, 
	reason TEXT NOT NULL, 
	desired VARCHAR(16) NOT NULL, 
	mode VARCHAR(16) NOT NULL, 
	generation BIGINT NOT NULL, 
	term BIGINT NOT NULL, 
	next_epoch BIGINT NOT NULL, 
	in_flight BIGINT NOT NULL, 
	newest_durable BIGINT NOT NULL, 
	newest_committed BIGINT NOT NULL, 
	restore_epoch BIGINT NOT NULL, 
	target VARCHAR(16) NOT NULL, 
	restore_from VARCHAR(128) NOT NULL, 
	lenient INTEGER NOT NULL, 
	renames TEXT NOT NULL, 
	aborts INTEGER NOT NULL, 
	failures INTEGER NOT NULL, 
	stalls INTEGER NOT NULL, 
	restarts INTEGER NOT NULL, 
	recent_restarts TEXT NOT NULL, 
	causes TEXT NOT NULL, 
	wanted_savepoint VARCHAR(128) NOT NULL, 
	wants_epoch INTEGER NOT NULL, 
	pending_commits TEXT NOT NULL, 
	splits_rev BIGINT NOT NULL, 
	deployed_us BIGINT NOT NULL, 
	due_us BIGINT NOT NULL, 
	epoch_us BIGINT NOT NULL, 
	restarted_us BIGINT NOT NULL, 
	stopping_us BIGINT NOT NULL, 
	created_us BIGINT NOT NULL, 
	changed_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	ended INTEGER NOT NULL, 
	live_name VARCHAR(130), 
	PRIMARY KEY (id), 
	CONSTRAINT millstream_job_state CHECK (state IN ('PENDING', 'WAITING_FOR_RESOURCES', 'DEPLOYING', 'RUNNING', 'RESTARTING', 'STOPPING', 'STOPPED', 'FINISHED', 'FAILED')), 
	CONSTRAINT millstream_job_desired CHECK (desired IN ('RUN', 'CANCEL', 'DRAIN', 'SUSPEND')), 
	CONSTRAINT millstream_job_commit_after_durable CHECK (newest_committed <= newest_durable), 
	UNIQUE (live_name)
);
CREATE TABLE millstream_lane (
	id VARCHAR(160) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	queue VARCHAR(64) NOT NULL, 
	weight INTEGER NOT NULL, 
	paused INTEGER NOT NULL, 
	backlog INTEGER NOT NULL, 
	changed_by VARCHAR(128) DEFAULT '' NOT NULL, 
	changed_us BIGINT DEFAULT 0 NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT millstream_lane_weight CHECK (weight >= 1)
);
INSERT INTO "millstream_lane" VALUES('default/idle','default','idle',1,1,0,'',0,1);
INSERT INTO "millstream_lane" VALUES('default/slow','default','slow',3,0,0,'unnamed',1796051312837246,1);
INSERT INTO "millstream_lane" VALUES('default/later','default','later',1,1,0,'',0,1);
CREATE TABLE millstream_manifest (
	job VARCHAR(64) NOT NULL, 
	epoch BIGINT NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	body TEXT NOT NULL, 
	checksum VARCHAR(64) NOT NULL, 
	created_us BIGINT NOT NULL, 
	PRIMARY KEY (job, epoch)
);
CREATE TABLE millstream_node (
	id VARCHAR(64) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	slots INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	info TEXT NOT NULL, 
	started_us BIGINT NOT NULL, 
	renewed_us BIGINT NOT NULL, 
	expires_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT millstream_node_state CHECK (state IN ('ACTIVE', 'DRAINING', 'GONE')), 
	CONSTRAINT millstream_node_slots CHECK (slots >= 0)
);
INSERT INTO "millstream_node" VALUES('session-19c11b6c73806a2e192e','embedded',0,'DRAINING','{"queues":["calls","default","slow"],"handlers":{"again":"117aae85575ec8dac849d241f5544900","book":"de8bb2c2eaa2d7f06fe3621c09a5af49","call":"94e385a4b6bf794bf3bfe047975330ce","echo":"83826f80cb665844169e761c1c242e89","fail":"27c741ce1db5441822ba44dfc820a3db","hold":"eb62dc890806092e35b680121f49e313"},"counts":{"ends_applied":23,"ends_duplicate":0,"ends_stale":0,"set_aside":0,"defects":0,"tasks_set_aside":0,"schedules_held":0}}',1796051311148165,1796051313625179,1796051323625179,2);
CREATE TABLE millstream_note (
	task VARCHAR(64) NOT NULL, 
	fence BIGINT NOT NULL, 
	number INTEGER NOT NULL, 
	text TEXT NOT NULL, 
	fields TEXT NOT NULL, 
	at_us BIGINT NOT NULL, 
	PRIMARY KEY (task, fence, number)
);
INSERT INTO "millstream_note" VALUES('task-f51a9d94a0a29f74fd61',1,1,'noted','',1796051313201685);
CREATE TABLE millstream_operation (
	id VARCHAR(64) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	act VARCHAR(16) NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	filter TEXT NOT NULL, 
	instant_us BIGINT NOT NULL, 
	expected BIGINT NOT NULL, 
	reason TEXT NOT NULL, 
	actor VARCHAR(128) NOT NULL, 
	after_us BIGINT NOT NULL, 
	after_id VARCHAR(64) NOT NULL, 
	seen BIGINT NOT NULL, 
	done BIGINT NOT NULL, 
	over INTEGER NOT NULL, 
	created_us BIGINT NOT NULL, 
	changed_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT millstream_operation_act CHECK (act IN ('cancel', 'retry', 'purge'))
);
INSERT INTO "millstream_operation" VALUES('operation-0c2b25fff2731033271c','default','retry','task-9907c14537b15fbf204e','',1796051313091272,1,'kept','',0,'',1,1,1,1796051313091272,1796051313091272,0);
CREATE TABLE millstream_permit (
	id VARCHAR(300) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	"key" VARCHAR(200) NOT NULL, 
	capacity INTEGER NOT NULL, 
	held INTEGER NOT NULL, 
	seq BIGINT NOT NULL, 
	paused INTEGER NOT NULL, 
	changed_by VARCHAR(128) DEFAULT '' NOT NULL, 
	changed_us BIGINT DEFAULT 0 NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT millstream_permit_held CHECK (held >= 0), 
	CONSTRAINT millstream_permit_capacity CHECK (capacity >= 1)
);
INSERT INTO "millstream_permit" VALUES('default/account:7','default','account:7',2,0,2,0,'unnamed',1796051313063306,5);
CREATE TABLE millstream_progress (
	task VARCHAR(64) NOT NULL, 
	fence BIGINT NOT NULL, 
	number INTEGER NOT NULL, 
	done DOUBLE NOT NULL, 
	total DOUBLE, 
	message TEXT NOT NULL, 
	at_us BIGINT NOT NULL, 
	PRIMARY KEY (task, fence)
);
INSERT INTO "millstream_progress" VALUES('task-f51a9d94a0a29f74fd61',1,1,1.0,2.0,'half',1796051312558263);
CREATE TABLE millstream_quota (
	id VARCHAR(160) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	queue VARCHAR(64) NOT NULL, 
	accepting INTEGER NOT NULL, 
	backlog INTEGER NOT NULL, 
	accept INTEGER NOT NULL, 
	per_us BIGINT NOT NULL, 
	changed_by VARCHAR(128) NOT NULL, 
	changed_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT millstream_quota_window CHECK (accept = 0 OR per_us >= 1)
);
INSERT INTO "millstream_quota" VALUES('default/slow','default','slow',1,1000,0,0,'unnamed',1796051312870066,0);
CREATE TABLE millstream_retention (
	namespace VARCHAR(64) NOT NULL, 
	scope VARCHAR(16) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	keep_us BIGINT NOT NULL, 
	actor VARCHAR(128) NOT NULL, 
	changed_us BIGINT NOT NULL, 
	PRIMARY KEY (namespace, scope, name), 
	CONSTRAINT millstream_retention_scope CHECK (scope IN ('', 'queue', 'handler'))
);
CREATE TABLE millstream_savepoint (
	id VARCHAR(128) NOT NULL, 
	job VARCHAR(64) NOT NULL, 
	epoch BIGINT NOT NULL, 
	body TEXT NOT NULL, 
	checksum VARCHAR(64) NOT NULL, 
	model TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	error TEXT NOT NULL, 
	created_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE millstream_schedule (
	namespace VARCHAR(64) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	digest VARCHAR(80) NOT NULL, 
	next_us BIGINT, 
	due_us BIGINT, 
	last_us BIGINT NOT NULL, 
	tolerance_us BIGINT NOT NULL, 
	waiting VARCHAR(200), 
	tail_us BIGINT NOT NULL, 
	tail_state VARCHAR(16) NOT NULL, 
	fired BIGINT NOT NULL, 
	skipped BIGINT NOT NULL, 
	missed BIGINT NOT NULL, 
	late BIGINT NOT NULL, 
	actor VARCHAR(128) NOT NULL, 
	created_us BIGINT NOT NULL, 
	changed_us BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (namespace, name), 
	CONSTRAINT millstream_schedule_state CHECK (state IN ('ACTIVE', 'PAUSED', 'HELD', 'ENDED', 'DELETED')), 
	CONSTRAINT millstream_schedule_due CHECK ((due_us IS NOT NULL) = (state IN ('ACTIVE', 'HELD'))), 
	CONSTRAINT millstream_schedule_forward CHECK (next_us IS NULL OR next_us > last_us)
);
INSERT INTO "millstream_schedule" VALUES('default','yearly','ACTIVE','',1,'c339df3d06ea0ab21346791bc4e2aa04',1798758000000000,1798758000000000,0,60000000,NULL,0,'',1,0,0,0,'',1796051312646852,1796051312666087,2);
CREATE TABLE millstream_schedule_version (
	namespace VARCHAR(64) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	version INTEGER NOT NULL, 
	definition TEXT NOT NULL, 
	digest VARCHAR(80) NOT NULL, 
	actor VARCHAR(128) NOT NULL, 
	created_us BIGINT NOT NULL, 
	PRIMARY KEY (namespace, name, version)
);
INSERT INTO "millstream_schedule_version" VALUES('default','yearly',1,'{"spec":{"type":"cron","expression":"0 0 1 1 *","zone":"Europe/Berlin","gap":"run_after","fold":"first"},"rules":{"misfire":"once","limit":10,"window_us":86400000000,"overlap":"allow","jitter_us":0,"tolerance_us":60000000},"request":{"id":"schedule","namespace":"default","handler":"echo","key":"schedule/yearly","digest":"1:f8ace0e9e7b75ef1a031fc17d44336c9","queue":"default","args":"[[],[[\"l\",1],[\"k\"]]]","effects":"idempotent","policy":{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false},"priority":0,"delay_us":0,"due_us":0,"expires_us":0,"start_by_us":0,"deadline_us":0,"permit":"","ordered":false,"business_key":"","origin":"schedule","root":"","retry_of":"","actor":"schedule:yearly"}}','c339df3d06ea0ab21346791bc4e2aa04','',1796051312646852);
CREATE TABLE millstream_schema (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "millstream_schema" VALUES(1,3,'READY');
CREATE TABLE millstream_source (
	job VARCHAR(64) NOT NULL, 
	operator VARCHAR(64) NOT NULL, 
	complete INTEGER NOT NULL, 
	generation BIGINT NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (job, operator)
);
CREATE TABLE millstream_split (
	job VARCHAR(64) NOT NULL, 
	operator VARCHAR(64) NOT NULL, 
	split VARCHAR(255) NOT NULL, 
	body TEXT NOT NULL, 
	cursor TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	owner INTEGER NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (job, operator, split), 
	CONSTRAINT millstream_split_state CHECK (state IN ('UNASSIGNED', 'ASSIGNED', 'FINISHED'))
);
CREATE TABLE millstream_subscription (
	id VARCHAR(64) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	live_name VARCHAR(160), 
	seq BIGINT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	mode VARCHAR(16) NOT NULL, 
	target VARCHAR(200) NOT NULL, 
	celery_task VARCHAR(200) NOT NULL, 
	handler VARCHAR(200) NOT NULL, 
	queue VARCHAR(64) NOT NULL, 
	business_key VARCHAR(200) NOT NULL, 
	states VARCHAR(64) NOT NULL, 
	attempts INTEGER NOT NULL, 
	delay_ms BIGINT NOT NULL, 
	max_delay_ms BIGINT NOT NULL, 
	lease_ms BIGINT NOT NULL, 
	since_us BIGINT NOT NULL, 
	catch_up VARCHAR(16) NOT NULL, 
	from_us BIGINT NOT NULL, 
	until_us BIGINT NOT NULL, 
	ready_us BIGINT NOT NULL, 
	cursor_us BIGINT NOT NULL, 
	cursor_id VARCHAR(64) NOT NULL, 
	longest_us BIGINT NOT NULL, 
	created_us BIGINT NOT NULL, 
	changed_us BIGINT NOT NULL, 
	actor VARCHAR(128) NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT millstream_subscription_name UNIQUE (live_name), 
	CONSTRAINT millstream_subscription_seq UNIQUE (seq), 
	CONSTRAINT millstream_subscription_state CHECK (state IN ('ACTIVE', 'PAUSED', 'DELETED')), 
	CONSTRAINT millstream_subscription_mode CHECK (mode IN ('pull', 'queue')), 
	CONSTRAINT millstream_subscription_catch_up CHECK (catch_up IN ('SINCE', 'RACE', 'DONE')), 
	CONSTRAINT millstream_subscription_live CHECK ((live_name IS NULL) = (state = 'DELETED')), 
	CONSTRAINT millstream_subscription_attempts CHECK (attempts >= 1)
);
INSERT INTO "millstream_subscription" VALUES('subscription-5241783c1f8d568a7ad6','default','ends','default/ends',1,'ACTIVE','pull','','','echo','','','',20,0,3600000,60000,0,'DONE',0,0,0,0,'',0,1796051311238841,1796051311238841,'',0);
CREATE TABLE millstream_task (
	id VARCHAR(64) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	handler VARCHAR(200) NOT NULL, 
	"key" VARCHAR(200) NOT NULL, 
	digest VARCHAR(80) NOT NULL, 
	queue VARCHAR(64) NOT NULL, 
	business_key VARCHAR(200) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	cause VARCHAR(16) NOT NULL, 
	reason TEXT NOT NULL, 
	effects VARCHAR(16) NOT NULL, 
	policy TEXT NOT NULL, 
	args TEXT NOT NULL, 
	priority INTEGER NOT NULL, 
	fence BIGINT NOT NULL, 
	token VARCHAR(64) NOT NULL, 
	session VARCHAR(64) NOT NULL, 
	claim VARCHAR(64) NOT NULL, 
	failures INTEGER NOT NULL, 
	crashes INTEGER NOT NULL, 
	losses INTEGER NOT NULL, 
	snoozes INTEGER NOT NULL, 
	starts INTEGER NOT NULL, 
	cancel INTEGER NOT NULL, 
	permit VARCHAR(200) NOT NULL, 
	ordered INTEGER NOT NULL, 
	permit_held INTEGER NOT NULL, 
	permit_seq BIGINT NOT NULL, 
	blocked_by VARCHAR(300), 
	ready_lane VARCHAR(160), 
	rank BIGINT NOT NULL, 
	wake_us BIGINT, 
	due_us BIGINT NOT NULL, 
	start_by_us BIGINT NOT NULL, 
	deadline_us BIGINT NOT NULL, 
	claimed_us BIGINT NOT NULL, 
	started_us BIGINT NOT NULL, 
	settled_us BIGINT NOT NULL, 
	created_us BIGINT NOT NULL, 
	changed_us BIGINT NOT NULL, 
	result TEXT NOT NULL, 
	error TEXT NOT NULL, 
	origin VARCHAR(200) NOT NULL, 
	root VARCHAR(64) NOT NULL, 
	retry_of VARCHAR(64) NOT NULL, 
	superseded_by VARCHAR(64) NOT NULL, 
	actor VARCHAR(128) NOT NULL, 
	marker VARCHAR(64) DEFAULT '' NOT NULL, 
	ending TEXT, 
	error_class VARCHAR(200) DEFAULT '' NOT NULL, 
	amiss_us BIGINT, 
	tokens INTEGER DEFAULT 0 NOT NULL, 
	limit_us BIGINT, 
	open_intents INTEGER DEFAULT 0 NOT NULL, 
	rev BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT millstream_task_identity UNIQUE (namespace, handler, "key"), 
	CONSTRAINT millstream_task_state CHECK (state IN ('SCHEDULED', 'READY', 'DISPATCHED', 'RUNNING', 'RETRY_WAIT', 'UNKNOWN', 'SUCCEEDED', 'FAILED', 'CANCELLED', 'EXPIRED')), 
	CONSTRAINT millstream_task_effects CHECK (effects IN ('idempotent', 'transactional', 'external')), 
	CONSTRAINT millstream_task_held CHECK ((state IN ('DISPATCHED', 'RUNNING')) = (session <> '')), 
	CONSTRAINT millstream_task_ready CHECK (ready_lane IS NULL OR (state = 'READY' AND blocked_by IS NULL)), 
	CONSTRAINT millstream_task_waiting CHECK ((wake_us IS NOT NULL) = (state IN ('SCHEDULED', 'RETRY_WAIT')))
);
INSERT INTO "millstream_task" VALUES('task-216455606f77ae8c5745','default','echo','value-0','1:bb500144a42ba8d5012ccca4d9d5a813','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",null],["k"]]]',0,1,'token-8df7b282420b8a6e6b00','','claim-f18539df2f1a1b87b89a',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311396591,NULL,1796051311396597,0,0,1796051311607746,1796051311607746,1796051311661219,1796051311396598,1796051311661219,'[[],[null]]','','direct','task-216455606f77ae8c5745','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-cf05ab659cc895501758','default','echo','value-1','1:e8457dcca2559cfcccfab478c40d185b','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",true],["k"]]]',0,1,'token-8df7b282420b8a6e6b00','','claim-f18539df2f1a1b87b89a',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311407509,NULL,1796051311407514,0,0,1796051311607746,1796051311607746,1796051311661219,1796051311407515,1796051311661219,'[[],[true]]','','direct','task-cf05ab659cc895501758','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-83457bc935cff059e8d3','default','echo','value-2','1:454407142286678cf276760bbac43078','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",["i","0x1d6329f1c35ca4bfabb9f5610000000000"]],["k"]]]',0,1,'token-8df7b282420b8a6e6b00','','claim-f18539df2f1a1b87b89a',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311417525,NULL,1796051311417531,0,0,1796051311607746,1796051311607746,1796051311661219,1796051311417533,1796051311661219,'[[],[["i","0x1d6329f1c35ca4bfabb9f5610000000000"]]]','','direct','task-83457bc935cff059e8d3','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-da3e1314fba4a69d23f7','default','echo','value-3','1:9490ccf12f7ee5aa0562d33d3ce8fec0','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",-1],["k"]]]',0,1,'token-8df7b282420b8a6e6b00','','claim-f18539df2f1a1b87b89a',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311421854,NULL,1796051311421858,0,0,1796051311607746,1796051311607746,1796051311661219,1796051311421859,1796051311661219,'[[],[-1]]','','direct','task-da3e1314fba4a69d23f7','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-544a9ebe1bb9c7bae735','default','echo','value-4','1:1aca032a572bc6d28a8b279ea8efe3fd','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",0.1],["k"]]]',0,1,'token-8df7b282420b8a6e6b00','','claim-f18539df2f1a1b87b89a',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311428121,NULL,1796051311428128,0,0,1796051311607746,1796051311607746,1796051311661219,1796051311428130,1796051311661219,'[[],[0.1]]','','direct','task-544a9ebe1bb9c7bae735','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-30bef8e1121e88a7c6ba','default','echo','value-5','1:58a7bad9d90d01a14faedd5b1fc0123d','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",["f","inf"]],["k"]]]',0,1,'token-8df7b282420b8a6e6b00','','claim-f18539df2f1a1b87b89a',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311438476,NULL,1796051311438481,0,0,1796051311607746,1796051311607746,1796051311661219,1796051311438483,1796051311661219,'[[],[["f","inf"]]]','','direct','task-30bef8e1121e88a7c6ba','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-08ba964e020034154dce','default','echo','value-6','1:d40d74ebeb91ce385937ad5a10e0b582','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",["D","1.10"]],["k"]]]',0,1,'token-8df7b282420b8a6e6b00','','claim-f18539df2f1a1b87b89a',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311446377,NULL,1796051311446382,0,0,1796051311607746,1796051311607746,1796051311661219,1796051311446383,1796051311661219,'[[],[["D","1.10"]]]','','direct','task-08ba964e020034154dce','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-a4d5ed602466ec758008','default','echo','value-7','1:1c396cf0236704e7a65b2d33bc778bf4','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l","é\u0000\n"],["k"]]]',0,1,'token-8df7b282420b8a6e6b00','','claim-f18539df2f1a1b87b89a',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311453008,NULL,1796051311453014,0,0,1796051311607746,1796051311607746,1796051311725297,1796051311453015,1796051311725297,'[[],["é\u0000\n"]]','','direct','task-a4d5ed602466ec758008','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-1ce9f424efd51e0702f6','default','echo','value-8','1:31fb05c36e66fe4431c26bd4a61cdf88','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",["y","AP8="]],["k"]]]',0,1,'token-e685afcd33a00070ed48','','claim-199561d1deb8d69c1d01',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311462009,NULL,1796051311462014,0,0,1796051311705287,1796051311705287,1796051311739744,1796051311462015,1796051311739744,'[[],[["y","AP8="]]]','','direct','task-1ce9f424efd51e0702f6','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-76f102b2eacf8341929d','default','echo','value-9','1:401d18ae29fbd67e66cc2395c88698f0','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",["m",["t",63902822400000000,0,0]]],["k"]]]',0,1,'token-e685afcd33a00070ed48','','claim-199561d1deb8d69c1d01',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311468717,NULL,1796051311468722,0,0,1796051311705287,1796051311705287,1796051311739744,1796051311468724,1796051311739744,'[[],[["m",["t",63902822400000000,0,0]]]]','','direct','task-76f102b2eacf8341929d','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-720d0aa50460287ea437','default','echo','value-10','1:16ce5f6956a70dd286e1de53c291e331','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",["d",739617]],["k"]]]',0,1,'token-e685afcd33a00070ed48','','claim-199561d1deb8d69c1d01',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311472856,NULL,1796051311472859,0,0,1796051311705287,1796051311705287,1796051311739744,1796051311472860,1796051311739744,'[[],[["d",739617]]]','','direct','task-720d0aa50460287ea437','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-a98f076a8c17099d0a72','default','echo','value-11','1:6a1cc169554a877a19254a38fb37bf80','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",["e",1]],["k"]]]',0,1,'token-e685afcd33a00070ed48','','claim-199561d1deb8d69c1d01',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311482031,NULL,1796051311482036,0,0,1796051311705287,1796051311705287,1796051311739744,1796051311482037,1796051311739744,'[[],[["e",1]]]','','direct','task-a98f076a8c17099d0a72','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-4f089e55e062f2fe6a79','default','echo','value-12','1:63b328e71bd350ac2d750d83556991b5','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",["t",1,"a"]],["k"]]]',0,1,'token-e685afcd33a00070ed48','','claim-199561d1deb8d69c1d01',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311490562,NULL,1796051311490566,0,0,1796051311705287,1796051311705287,1796051311739744,1796051311490568,1796051311739744,'[[],[["t",1,"a"]]]','','direct','task-4f089e55e062f2fe6a79','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-893f210168c8fe7ed930','default','echo','value-13','1:4af2a28808c1d9ae5e2e89233f597f9c','default','values','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",["k","a",["l",1,["k","b",null]],"c",["s",1,2]]],["k"]]]',0,1,'token-e685afcd33a00070ed48','','claim-199561d1deb8d69c1d01',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311498297,NULL,1796051311498302,0,0,1796051311705287,1796051311705287,1796051311739744,1796051311498304,1796051311739744,'[[],[["k","a",["l",1,["k","b",null]],"c",["s",1,2]]]]','','direct','task-893f210168c8fe7ed930','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-9907c14537b15fbf204e','default','fail','failed','1:7fd6d7f40ed71866882d480c581c7428','default','','FAILED','attempts','ValueError: kept for later versions (at fail, line 53)','idempotent','{"attempts":1,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l"],["k"]]]',0,1,'token-49bc2ea0129f0f976f5a','','claim-beae808c9dd939d3b65d',1,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311776939,NULL,1796051311776945,0,0,1796051311805181,1796051311805181,1796051311818088,1796051311776947,1796051311818088,'','ValueError: kept for later versions (at fail, line 53)','direct','task-9907c14537b15fbf204e','','task-d5c1e6ce925376e405e6','','',NULL,'ValueError',1796051311776947,0,NULL,0,3);
INSERT INTO "millstream_task" VALUES('task-c087580d983d7ebcf61e','default','call','known','1:baf9d3a57327ca36f0eb991990d7af1f','calls','','UNKNOWN','handler','asked for 1','external','{"attempts":1,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",1],["k"]]]',0,1,'token-8e7d7b968af02533b1b5','','claim-fd216b7e162817849eb8',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311781192,NULL,1796051311781196,0,0,1796051311952870,1796051311965014,0,1796051311781197,1796051312141543,'','asked for 1','direct','task-c087580d983d7ebcf61e','','','','',NULL,'',1796051311781197,0,NULL,0,5);
INSERT INTO "millstream_task" VALUES('task-383fefb14f34a546379d','default','call','doubted','1:0887a5043affbd3c838d0e816418d44f','calls','','UNKNOWN','intent','nobody knows whether ''doubted'' was called: ZeroDivisionError: division by zero; its handler has no reconcile hook','external','{"attempts":1,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",2],["k"]]]',0,1,'token-8e7d7b968af02533b1b5','','claim-fd216b7e162817849eb8',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051311791023,NULL,1796051311791027,0,0,1796051311952870,1796051312056710,0,1796051311791028,1796051312166489,'','nobody knows whether ''doubted'' was called: ZeroDivisionError: division by zero; its handler has no reconcile hook','direct','task-383fefb14f34a546379d','','','','',NULL,'',1796051311791028,0,NULL,1,6);
INSERT INTO "millstream_task" VALUES('task-83e33eadac965919b881','default','book','book-0','1:b6526ed2be6f92125f8d037224276c86','default','','SUCCEEDED','','','transactional','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",7],["k"]]]',0,1,'token-654bc4ae1b0f54d2c9c3','','claim-a9f53114e5c0c948653a',0,0,0,0,1,0,'account:7',0,0,1,NULL,NULL,1796051312187244,NULL,1796051312187249,0,0,1796051312191584,1796051312191584,1796051312212267,1796051312187251,1796051312212267,'[[],[["k","booked",7,"permit",1]]]','','direct','task-83e33eadac965919b881','','','','',NULL,'',NULL,0,NULL,0,3);
INSERT INTO "millstream_task" VALUES('task-2aac70f29954e69bb886','default','book','book-1','1:b6526ed2be6f92125f8d037224276c86','default','','SUCCEEDED','','','transactional','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",7],["k"]]]',0,1,'token-1dbb2833f1c0461b963f','','claim-57ec8bca43da60f727d2',0,0,0,0,1,0,'account:7',0,0,2,NULL,NULL,1796051312221619,NULL,1796051312221622,0,0,1796051312405258,1796051312405258,1796051312412038,1796051312221623,1796051312412038,'[[],[["k","booked",7,"permit",2]]]','','direct','task-2aac70f29954e69bb886','','','','',NULL,'',NULL,0,NULL,0,5);
INSERT INTO "millstream_task" VALUES('task-f51a9d94a0a29f74fd61','default','hold','held','1:904c764184cf91e5de732e87665094d1','slow','','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l"],["k"]]]',0,1,'token-5a4e2f08266eee4231e2','','claim-c86091790c4afa8aeecd',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051312432099,NULL,1796051312432101,0,0,1796051312467015,1796051312467015,1796051313203821,1796051312432102,1796051313203821,'[[],[null]]','','direct','task-f51a9d94a0a29f74fd61','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-5b46913f298eb44318c2','default','again','waits','1:2a65f694962b91be2f82ccaa68ddf3a3','default','','RETRY_WAIT','handler','not this year','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l"],["k"]]]',0,1,'token-4cee201ce9bb76cb8989','','claim-5a2793f8c54582e5e982',1,0,0,0,1,0,'',0,0,0,NULL,NULL,1821971312563916,1821971312563916,1796051312505202,0,0,1796051312527873,1796051312527873,0,1796051312505203,1796051312563916,'','','direct','task-5b46913f298eb44318c2','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-a6c0730ae054a0004b60','default','echo','scheduled','1:3d2f62a0fc0a174968ecfb60b47b1e1e','default','','SCHEDULED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",1],["k"]]]',0,0,'','','',0,0,0,0,0,0,'',0,0,0,NULL,NULL,4070908800000000,4070908800000000,4070908800000000,0,0,0,0,0,1796051312516056,1796051312516059,'','','direct','task-a6c0730ae054a0004b60','','','','',NULL,'',NULL,0,NULL,0,0);
INSERT INTO "millstream_task" VALUES('task-eff85893fec63692e55e','default','echo','cancelled','1:3d2f62a0fc0a174968ecfb60b47b1e1e','default','','CANCELLED','cancelled','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",1],["k"]]]',0,0,'','','',0,0,0,0,0,0,'',0,0,0,NULL,NULL,4070908800000000,NULL,4070908800000000,0,0,0,0,1796051312585941,1796051312549714,1796051312585941,'','','direct','task-eff85893fec63692e55e','','','','',NULL,'',1796051312549714,0,NULL,0,1);
INSERT INTO "millstream_task" VALUES('task-3734c734ca28f641054a','default','echo','expired','1:a3d7620304b3f1cd162970d338b00103','default','','EXPIRED','start_by','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",1],["k"]]]',0,0,'','','',0,0,0,0,0,0,'',0,0,0,NULL,NULL,1796051312644554,NULL,1796051312644561,1796051312645562,0,0,0,1796051312938982,1796051312634563,1796051312938982,'','','direct','task-3734c734ca28f641054a','','','','',NULL,'',1796051312634563,0,NULL,0,1);
INSERT INTO "millstream_task" VALUES('task-16f5bbd3d3440884e0f2','default','echo','schedule/yearly/manual/by-hand/0','1:f8ace0e9e7b75ef1a031fc17d44336c9','default','','SUCCEEDED','','','idempotent','{"attempts":5,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l",1],["k"]]]',0,1,'token-5d53954a508ee6bd7483','','claim-6045de6accb39610fccc',0,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051312677821,NULL,1796051312677826,0,0,1796051313174297,1796051313174297,1796051313211968,1796051312677827,1796051313211968,'[[],[1]]','','schedule:yearly:1:1796051312666087','task-16f5bbd3d3440884e0f2','','','','',NULL,'',NULL,0,NULL,0,2);
INSERT INTO "millstream_task" VALUES('task-d5c1e6ce925376e405e6','default','fail','task-9907c14537b15fbf204e/retry','1:7fd6d7f40ed71866882d480c581c7428','default','','FAILED','attempts','ValueError: kept for later versions (at fail, line 53)','idempotent','{"attempts":1,"delay_ms":1000,"max_delay_ms":600000,"jitter":0.2,"crashes":3,"losses":20,"snoozes":1000,"run_ms":0,"grace_ms":5000,"heartbeat_ms":30000,"permit_capacity":1,"start_by_ms":0,"deadline_ms":0,"intents_only":false,"reconciles":false}','[[],[["l"],["k"]]]',0,1,'token-5d53954a508ee6bd7483','','claim-6045de6accb39610fccc',1,0,0,0,1,0,'',0,0,0,NULL,NULL,1796051313088516,NULL,1796051313088521,0,0,1796051313174297,1796051313174297,1796051313211968,1796051313088523,1796051313211968,'','ValueError: kept for later versions (at fail, line 53)','retry:operation-0c2b25fff2731033271c','task-9907c14537b15fbf204e','task-9907c14537b15fbf204e','','','',NULL,'ValueError',1796051313088523,0,NULL,0,2);
CREATE INDEX ix_millstream_assignment_node ON millstream_assignment (node);
CREATE INDEX millstream_task_limit_i ON millstream_task (limit_us) WHERE limit_us IS NOT NULL;
CREATE INDEX millstream_task_wake_i ON millstream_task (wake_us) WHERE wake_us IS NOT NULL;
CREATE INDEX millstream_task_ready_i ON millstream_task (ready_lane, rank, id) WHERE ready_lane IS NOT NULL;
CREATE INDEX millstream_task_amiss_i ON millstream_task (namespace, amiss_us) WHERE amiss_us IS NOT NULL;
CREATE INDEX millstream_task_retry_i ON millstream_task (retry_of) WHERE retry_of <> '';
CREATE INDEX millstream_task_business_i ON millstream_task (namespace, business_key, created_us) WHERE business_key <> '';
CREATE INDEX millstream_task_created_i ON millstream_task (namespace, created_us);
CREATE INDEX millstream_task_open_i ON millstream_task (namespace, queue, settled_us) WHERE settled_us = 0;
CREATE INDEX millstream_task_settled_i ON millstream_task (namespace, settled_us) WHERE settled_us > 0;
CREATE INDEX millstream_task_session_i ON millstream_task (session, state) WHERE session <> '';
CREATE INDEX millstream_task_permit_i ON millstream_task (namespace, permit, state, rank) WHERE permit <> '';
CREATE INDEX millstream_task_blocked_i ON millstream_task (blocked_by, rank, id) WHERE blocked_by IS NOT NULL;
CREATE INDEX millstream_schedule_waiting_i ON millstream_schedule (waiting);
CREATE INDEX millstream_schedule_due_i ON millstream_schedule (due_us);
CREATE INDEX millstream_fire_unsettled_i ON millstream_fire (unsettled, namespace, schedule);
CREATE INDEX millstream_fire_recent_i ON millstream_fire (namespace, schedule, recorded_us);
CREATE INDEX millstream_fire_old_i ON millstream_fire (recorded_us);
CREATE INDEX millstream_gate_namespace_i ON millstream_gate (namespace, kind, name);
CREATE INDEX millstream_gate_wake_i ON millstream_gate (wake_us);
CREATE INDEX millstream_quota_namespace_i ON millstream_quota (namespace);
CREATE INDEX millstream_acceptance_quota_i ON millstream_acceptance (quota, at_us);
CREATE INDEX millstream_acceptance_at_i ON millstream_acceptance (at_us);
CREATE INDEX millstream_subscription_seq_i ON millstream_subscription (namespace, seq);
CREATE INDEX millstream_event_pending_i ON millstream_event (pending, settled_us) WHERE pending IS NOT NULL;
CREATE INDEX millstream_event_settled_i ON millstream_event (settled_us);
CREATE INDEX millstream_delivery_lease_i ON millstream_delivery (lease) WHERE lease <> '';
CREATE INDEX millstream_delivery_state_i ON millstream_delivery (subscription, state, changed_us);
CREATE INDEX millstream_delivery_due_i ON millstream_delivery (subscription, due_us, event) WHERE due_us IS NOT NULL;
CREATE INDEX millstream_delivery_event_i ON millstream_delivery (event);
CREATE INDEX millstream_operation_created_i ON millstream_operation (namespace, created_us);
COMMIT;
