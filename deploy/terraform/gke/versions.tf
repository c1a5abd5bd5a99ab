# Which Terraform and provider this was written for, and where the state lives.

terraform {
  required_version = ">= 1.9, < 2.0"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "6.50.0" # tests/deploy/google_provider_schema.json is this version's schema: change both
    }
  }

  # Bucket and prefix come from `terraform init -backend-config=...`: see backend.hcl.example.
  backend "gcs" {}
}

provider "google" {
  project = var.project_id
  region  = var.region
}
