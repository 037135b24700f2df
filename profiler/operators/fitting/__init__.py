"""From profile tables to a model file: fits of GEMMs and attention, noise floors, and errors on structures that were
left out. The result is one readable JSON beside evaluated tables, without pickle.
"""
