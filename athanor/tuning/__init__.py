"""Training of other people's models, and of our own export, by transformers, peft and TRL."""
