"""Outer optimizer of semi-synchronous training: LocalSGD and DiLoCo."""
