"""Other systems on the same inputs, each a script of its own in an environment of its own, through that system's public interface only."""
