"""The model runner: batches, encoder runs, positions, decode graphs."""
