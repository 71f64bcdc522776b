"""What the server of forks imports: it asks what to import, see `pipeloom.forks`."""

from pipeloom.forks import serve_imports

serve_imports()
