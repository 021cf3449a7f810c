"""Ways to attend to a real context, in plain torch on any device, to measure what each loses against full attention."""
