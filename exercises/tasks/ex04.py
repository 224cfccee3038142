"""stub"""
TASKS = []
