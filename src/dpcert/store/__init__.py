"""Files between stages: durable writes, run directories, and the schemas of what they hold."""
