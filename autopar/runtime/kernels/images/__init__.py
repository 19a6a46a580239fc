"""Convolutions, pools and resampling of images of which every rank has a block, with their halos."""
