"""Planner: memory and speed of a run, predicted from the trainer's own build and step on fake tensors.

The modules, in the order of a prediction:

- `supported`, `cuda/devices`: supported options; device, its capacity and rates.
- `trace/`: fake process group (`fake_world`), dispatch mode with operator costs and op cache, memory tracker, and the
  segments of a traced step.
- `extrapolate/`: eligibility, samples of a small model, schedule simulation; allocation events of every pipeline rank,
  composed from the samples.
- `cuda/`: device table, fake CUDA kernels, and torch's caching allocator, which replays allocation events.
- `roofline`: step time.
- `predict`: prediction of a run by all of these, in `planner_processes`; `tables`, `prediction`: its output.
- `search/`: seeds and moves of layouts, and descent along them by `predict`.
- `gate/`: memory check before a launch, cached predictions, and moves for a run that does not fit.
- `visualize/`: HTML page and Perfetto timeline.
"""
