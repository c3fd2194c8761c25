"""Names and signatures that people already use, built on overspill's verbs: changing one import is the migration."""
