"""Work on clients' text, in processes that may crash or hang at no cost to the server."""
