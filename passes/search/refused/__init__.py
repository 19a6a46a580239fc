"""Why nothing fits, and the nearest changes of the request under which something would."""
