"""The `openk3` command: one module per subcommand, each thin (parse, call, print)."""
