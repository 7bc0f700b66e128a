"""Where kvslim plugs into other tools."""
