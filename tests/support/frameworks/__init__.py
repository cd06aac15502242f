"""Small models and stubs of what frameworks bring."""
