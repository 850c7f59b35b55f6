"""What trainers plug in; each module imports its trainer when it is imported itself."""
