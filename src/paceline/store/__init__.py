"""The door to our own disk formats and to the Hub; nobody else loads or writes a model."""
