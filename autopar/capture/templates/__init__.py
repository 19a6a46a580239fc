"""From a captured graph to templates: segments folded, branches cut, each traced forward and backward."""
