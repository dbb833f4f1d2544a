"""Recording inside training frameworks; import the module of the framework in use."""
