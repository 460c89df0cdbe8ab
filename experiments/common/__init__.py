"""What all commands share: options, records, colors, the compilation cache."""
