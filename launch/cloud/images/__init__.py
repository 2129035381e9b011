"""Plan, build and check the image of a training job, for launch/build_image.py."""
