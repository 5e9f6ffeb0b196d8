"""What surrounds the step machines in a real process: threads, pipes, sockets."""
