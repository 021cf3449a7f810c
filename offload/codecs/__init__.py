"""Codecs that keep a context's rows in fewer bytes: formats by name, their definition, encoders and decoders."""
