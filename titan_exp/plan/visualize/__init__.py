"""Plan visualization: a page of shards, pipeline schedule, memory over a step, communication and step time."""
