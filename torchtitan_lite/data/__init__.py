"""From text to batches: corpus (which text), tokenizer, prepare (text -> token files), order (what when), loader."""
