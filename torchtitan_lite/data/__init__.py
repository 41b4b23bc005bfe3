"""From text to batches: prepare (text to token files), samples and packing (sequences), order, loader (batches)."""
