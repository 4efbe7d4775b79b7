"""How the processes of a run share the work: their mesh, and what each has of the model and of the batches."""
