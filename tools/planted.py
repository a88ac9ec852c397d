"""Where tools/canaries.py plants secrets; each `{}` is one."""

from __future__ import annotations

VARIABLES = {
    "HF_TOKEN": "hf_{}",
    "HUGGING_FACE_HUB_TOKEN": "hf_{}",
    "AWS_ACCESS_KEY_ID": "{}",
    "AWS_SECRET_ACCESS_KEY": "{}",
    "AWS_SESSION_TOKEN": "{}",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey={}==;B=c",
    "GITHUB_TOKEN": "ghp_{}",
    "OPENAI_API_KEY": "sk-proj-{}",
    "NPM_TOKEN": "npm_{}",
    "MLFLOW_TRACKING_PASSWORD": "{}",
    "MLFLOW_TRACKING_TOKEN": "{}",
    "WAREHOUSE": "postgresql://me:{}@db.example/x",
    "HOOK": "https://hooks.slack.com/services/T000/B000/{}",
    "DEPLOY": "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----",
    "PIP_INDEX_URL": "https://me:{}@pip.example/simple",
    "TORCH_INDEX": "https://me:{}@torch.example/simple",
    "HTTPS_PROXY": "http://me:{}@127.0.0.1:9",
    "SYNTHESIS_KEY": "{}",
    "ATHANOR_API_KEY": "{}",
}
# Where an address may hold a secret; each is a variable that a run records, a licence, and the tracking store's.
ADDRESSES = {
    "path": "http://127.0.0.1:9/{}/mlflow",
    "fragment": "http://127.0.0.1:9/mlflow#{}",
    "slash": "http://me:a/{}@127.0.0.1:9",
    "space": "http://me:a {}@127.0.0.1:9",
    "no scheme": "me:{}@127.0.0.1:9/x",
}
# What lies in a home and in a checkout, and is nobody's business.
PLANTED = {
    "home/.netrc": "machine 127.0.0.1 login me password {}\n",
    "home/.cache/huggingface/token": "hf_{}",
    "home/.aws/credentials": "[default]\naws_access_key_id = AKIAX\naws_secret_access_key = {}\n",
    "home/.config/pip/pip.conf": "[global]\nextra-index-url = https://me:{}@pip.example/simple\n",
    "home/.git-credentials": "https://me:{}@git.example\n",
    "home/.pypirc": "[pypi]\npassword = pypi-{}\n",
    "home/.ssh/id_ed25519": "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n",
    "home/.gitconfig": '[http]\n\textraheader = "AUTHORIZATION: Basic {}"\n[user]\n\tname = me\n\temail = me@localhost\n',
    "checkout/.env": "API_TOKEN={}\n",
    "checkout/server.key": "-----BEGIN PRIVATE KEY-----\n{}\n",
    "checkout/machine.yaml": "# {}\nlaunch: {{args: [--env=API_TOKEN={}]}}\n",
    "checkout/.dvc/config.local": "['remote \"store\"']\n    url = s3://bucket/x\n    secret_access_key = {}\n"
    "['remote \"web\"']\n    url = https://me:{}@dvc.example/x\n    password = {}\n",
    "checkout/.git/config": '[remote "origin"]\n\turl = https://me:{}@git.example/x.git\n',
}
