"""Sources -> token store -> rows -> (micro-batch, cursor); model and tokenizer files. No torch."""
