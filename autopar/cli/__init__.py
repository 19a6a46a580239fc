"""The command line `autopar`, a module for each of its commands."""
