"""The program for a part of the batch."""
