"""What a run will need before it is started: memory and disk of each model, from configs alone."""
