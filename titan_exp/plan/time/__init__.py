"""Step time: roofline and calibration."""
