"""Hold the planners that were published with systems, restated from their artifacts, with what else they fix."""
