"""Moving what a plan says: buckets on the wire, changes alone, a plain gather."""
