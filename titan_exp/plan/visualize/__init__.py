"""Plan visualization: a page that shows shards, pipeline schedule, memory over a step, communication and step time."""
