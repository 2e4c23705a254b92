"""The only code that times or traces anything."""
