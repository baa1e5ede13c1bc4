"""Options of captioned images and their encoders."""
