"""Files as data: schemas, bounds, JSON, safetensors and pickles read without running anything, and files replaced as one."""
