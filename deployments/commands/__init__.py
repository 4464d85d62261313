"""The subcommands of `outrider`, one module each."""
