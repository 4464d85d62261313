"""What runs and how it is run: Serve deployments, configuration, model folders and the command line."""
