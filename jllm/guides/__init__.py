"""What a text must look like, by llguidance: a guide as a value, and what matches a text against it."""
