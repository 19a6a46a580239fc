"""`autopar.parallelize`: a step of a training script, compiled once and run by every rank that the script runs on."""
