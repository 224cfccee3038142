"""What the `refengine` command does, one module a subcommand; `refengine.cli` only reads the arguments."""
