"""Files passed between stages: durable writes, run directories, and file schemas."""
