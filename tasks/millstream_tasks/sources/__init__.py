"""Sources that ship: memory, generator, files, SQL by key, Redis streams, RabbitMQ queues.

Opened by the subtask runner; built by user code through the app's public names. Import the module of the source you need: a module
that needs an optional client (redis, amqp) imports it only when its source is opened.
"""
