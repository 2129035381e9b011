"""What build_image.py is made of."""
