"""Trainers of other packages whose steps are autopar's: of transformers (and what subclasses its Trainer), and Lightning.

Nothing here is imported by autopar itself, and each module imports the one package that it is for.
"""
