"""Build script: all metadata comes from settings.ini."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'],
    keywords=cfg['keywords'].split(),
    author=cfg['author'], author_email=cfg['author_email'],
    license_expression=cfg['license'], license_files=['LICENSE'],
    long_description=(root/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    packages=find_packages(include=[cfg['lib_path'], cfg['lib_path']+'.*']),
    python_requires='>='+cfg['min_python'], install_requires=cfg['requirements'].split(),
    extras_require={k.removesuffix('_requirements'): v.split() for k, v in cfg.items() if k.endswith('_requirements')},
)
