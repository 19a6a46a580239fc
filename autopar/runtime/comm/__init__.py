"""Ranks and their messages: the environment, meshes, collectives, processes, threads, and the axes that ops see."""
