"""Pipeline parallelism: stage split, schedule, runtime."""
